"""A report in one HTML file: throughput over the trace, the table, recoveries. No scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from everstep.sim.curves import NUM_SPANS, picture
from everstep.sim.reports import LEGEND, duration, recoveries, table
from everstep.sim.results import Outcome
from everstep.sim.setting import Setting
from everstep.sim.trace import Trace


def render(outcomes: Sequence[Outcome], trace: Trace, setting: Setting) -> str:
    job = setting.job
    title = f"{job.name} under {trace.name}"
    shape = (
        f"{job.replicas} replicas x {job.stages} stages x {job.microbatches} micro-batches on"
        f" {setting.nodes} nodes (workers on each: {setting.workers_per_node}); {trace.num_losses}"
        f" losses of nodes in {duration(trace.duration_s)}, {duration(trace.mean_outage_s())} each."
    )
    curves = (
        f"Samples per second, means over {duration(trace.duration_s / NUM_SPANS)}; the ideal in"
        " grey; averages at the right."
    )
    ran = [outcome for outcome in outcomes if not outcome.does_not_fit]
    recovered = "".join(
        f"<li><b>{escape(o.system)}</b>: {escape(recoveries(o))}</li>" for o in ran if o.rungs
    )
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1><p>{escape(shape)}</p>\n"
        f"<h2>Throughput</h2><p>{escape(curves)}</p>\n{picture(ran, trace)}\n"
        f"<h2>Systems</h2>{_table(outcomes)}<p>{escape(_legend(outcomes))}</p>\n"
        f"<h2>Recoveries</h2><ul>{recovered}</ul></body></html>\n"
    )


_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td,th{padding:.3em .6em;text-align:right;"
    "white-space:nowrap;border-bottom:1px solid #ddd}td:first-child,th:first-child,td:last-child,"
    "th:last-child{text-align:left}td:last-child{white-space:normal;font-size:12px}"
    "svg{width:100%;height:auto}"
)


def _legend(outcomes: Sequence[Outcome]) -> str:
    paid = next((outcome for outcome in outcomes if outcome.money is not None), None)
    if paid is None:
        return f"{LEGEND}."
    return (
        f"{LEGEND}; per million: the price of a million samples. {paid.device_hours:,.0f} device"
        f" hours were up and cost {paid.money:,.2f}."
    )


def _table(outcomes: Sequence[Outcome]) -> str:
    header, *rows = table(outcomes)
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"
