"""Networks for ImageNet whose layers can be asked for by name."""
