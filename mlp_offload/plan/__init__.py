"""What happens to each subgroup, decided before it happens. Pure: no torch, no files, no clock."""
