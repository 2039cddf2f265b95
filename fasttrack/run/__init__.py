"""Running an experiment: seeds, environment, journal, runner."""
