"""Controllers: the facts they decide from, the rules of what is legal, observations, and the controllers."""
