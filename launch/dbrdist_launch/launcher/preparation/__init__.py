"""What a job is started with: settings, program, environment, places."""
