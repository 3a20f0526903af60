"""A stranger at the side channel: finds the launcher's port and knocks three times without the job's token."""

import json
import os
import socket

supervisor = f"/proc/{os.getppid()}/fd"
links = [os.readlink(f"{supervisor}/{name}") for name in os.listdir(supervisor)]
inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
with open("/proc/net/tcp") as file:
    remote = {words[2] for words in map(str.split, file) if words[9] in inodes}
port = int(remote.pop().split(":")[1], 16)
hello = json.dumps({"t": "hello", "token": "x" * 32, "rank": 0, "size": 1})
for text in (hello, "GET / HTTP/1.0", "z" * 9000):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(5)
        try:
            connection.sendall(text.encode() + b"\n")
            answer = connection.recv(100)
        except ConnectionError:
            answer = b""
        print("answer", answer, flush=True)
