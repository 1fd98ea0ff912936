"""What an engine of one machine is made of, whatever library runs its model: torch, and nothing beyond it."""
