"""How the processes of a run find each other, share a host, stay in touch and end. Their use: cluster.py, peers.py."""
