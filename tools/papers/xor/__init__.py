"""The XOR delta paper, section 3: Fig. 3 to 8, and the dynamic interval."""
