"""Children that pretend to be a canary's: what such a program begins with."""

PREAMBLE = """
import json, os, signal, subprocess, sys, time

def say(**message):
    os.write(1, json.dumps(message).encode() + b"\\n")

def reading(**fields):
    say(reading={"gpu": 0, "environment": {}, "value": 1.0, "start_ns": 0, "end_ns": 0, **fields})

def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(100)

settings = json.load(sys.stdin)
"""
