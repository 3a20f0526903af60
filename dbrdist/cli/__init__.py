"""The commands dbrdist-train and dbrdist-data: from a configuration to a run, and looks at runs."""
