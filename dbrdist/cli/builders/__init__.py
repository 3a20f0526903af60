"""From a configuration to what it names: data, network, optimizer, updater; checks before the first step."""
