"""A stranger at the side channel: knocks three times at the port of the first argument without the job's token."""

import json
import socket
import sys

hello = json.dumps({"t": "hello", "token": "x" * 32, "rank": 0, "size": 1})
for text in (hello, "GET / HTTP/1.0", "z" * 9000):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
        connection.settimeout(5)
        try:
            connection.sendall(text.encode() + b"\n")
            answer = connection.recv(100)
        except ConnectionError:
            answer = b""
        print("answer", answer, flush=True)
