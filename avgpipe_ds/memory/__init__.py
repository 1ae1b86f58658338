"""What training needs of an accelerator's memory, as numbers: measured, and predicted before anything is allocated."""
