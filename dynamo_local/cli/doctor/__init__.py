"""`dynamo doctor`: reads the host for the checks of `core.doctor`, shows their findings, and packs them."""
