"""A client's requests for chunks: whom to ask, when to ask again, how much at once. Pure."""
