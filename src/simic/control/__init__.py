"""Who decides: facts about hosts, the rules of what is legal, controllers, and the scheduler beside an optimizer."""
