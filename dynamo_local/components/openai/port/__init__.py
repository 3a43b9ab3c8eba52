"""One port that several Frontends of a component have: one listening socket, handed from one to the next."""
