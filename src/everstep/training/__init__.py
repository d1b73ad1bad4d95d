"""What users import: the job, and the run that trains it. `wiring` knows all concrete classes."""
