"""The command line: one file per verb, loaded when it is called, so that ``--help`` is quick."""
