"""Parts of the report page: blocks that are made of raw results."""
