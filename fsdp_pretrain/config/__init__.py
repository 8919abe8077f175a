"""What a run is: the sections of its TOML file, their rules, and which of them a resume may change."""
