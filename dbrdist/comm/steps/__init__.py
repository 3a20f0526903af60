"""One step of an optimizer that all ranks make together, and what it carries from step to step."""
