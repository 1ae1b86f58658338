"""What happens on one accelerator: N instruction streams, run by one executor."""
