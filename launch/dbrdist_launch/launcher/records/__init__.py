"""What others see of a job: its folder, the list of running jobs, figures for Prometheus."""
