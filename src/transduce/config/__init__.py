"""Settings: frozen, validated, each default written once."""
