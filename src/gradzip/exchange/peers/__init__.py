"""The other ranks: connections to them, their heartbeat, and what happens when one fails."""
