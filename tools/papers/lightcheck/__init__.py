"""LightCheck, section IV: Tables I to III and Fig. 5 to 15, as far as a machine without GPU and PM goes."""
