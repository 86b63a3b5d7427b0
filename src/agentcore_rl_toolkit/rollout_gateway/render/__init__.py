"""Messages to token ids, token ids to messages; history is extended, never rendered again."""
