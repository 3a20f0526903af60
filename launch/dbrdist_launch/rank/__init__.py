"""What stands around each rank: starts its program, passes on what it says, reports how it ends."""
