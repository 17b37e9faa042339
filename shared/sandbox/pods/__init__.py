"""Sandboxes in pods of a Kubernetes cluster, by kubernetes-sigs/agent-sandbox: an adapter of shared.sandbox.contract.

`objects` says what is asked of the cluster, `api` asks, `stream` speaks with a pod, `pod` holds one, `install` puts the loop
into pods. The sandbox itself is that of containers (shared/sandbox/containers/sandbox.py). docs/sandboxes.md, In pods of a cluster.
"""
