"""An engine behind an OpenAI-compatible API. Speaks to it through :class:`fasttrack.target.ServingEngine` alone."""
