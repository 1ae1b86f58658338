"""Parts of the measurement of time to accuracy."""
