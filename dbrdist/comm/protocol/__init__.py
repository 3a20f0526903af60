"""What ranks agree on before bytes travel: the gate that every collective passes, arguments, types, settings."""
