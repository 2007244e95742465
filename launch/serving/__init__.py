"""The server of `ringattn.launch.serve`: scheduling, what ranks say to each other, HTTP, the page."""
