"""Who trains, in which generation, up to which step: the coordinator, its core, its clients."""
