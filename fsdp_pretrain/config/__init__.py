"""The configuration of a run: sections of its TOML file, their checks, and which of them a resume may change."""
