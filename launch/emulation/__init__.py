"""Parts of the emulated cluster."""
