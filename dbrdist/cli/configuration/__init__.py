"""From YAML and overrides to a checked configuration, or to one error that lists every mistake with its place."""
