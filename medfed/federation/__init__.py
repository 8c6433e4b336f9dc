"""The contract between methods and engines: messages, server, client, admission, participation, checkpoint."""
