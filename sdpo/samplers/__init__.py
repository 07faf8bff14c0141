"""Samplers behind `sdpo.rollout.Sampler`: transformers in process (vLLM and others plug in beside it)."""
