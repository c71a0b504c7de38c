"""Polls /health until its input ends, then prints the longest response time in seconds.

It is a process of its own, so that the work of the attacker does not count.
"""

import select
import sys
import time
from http.client import HTTPConnection

if __name__ == "__main__":
    connection = HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=500)
    longest = 0.0
    sys.stdout.write("watching\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        began = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        longest = max(longest, time.perf_counter() - began)
        if response.status != 200:
            sys.exit(f"/health returned {response.status}")
    sys.stdout.write(str(longest))
