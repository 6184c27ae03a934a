"""PCcheck, section 5: Figures 2 and 8 to 14."""
