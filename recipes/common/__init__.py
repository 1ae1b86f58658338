"""What the recipes share: one concept per module, imported as `common.<module>` because a recipe is started as a script."""
