"""The HTTP process of the server, which has the clients and the tokenizer."""
