"""What of the figures is not as it should be, and why: written by hand, for the report."""

from __future__ import annotations

from typing import Final

LEFT: Final = """## What is left

Where three figures are given, they are of three random nets of the architecture.

- **The compiled step** was not run with every architecture: Inductor builds its C++ kernels
  for minutes, for three ways each. `make zoo ZOO_ARGS=--resume` goes on.
- **mixer, compiled**: its gradients are NaN under autocast, without finecast, too, where they
  are not op by op: Inductor 2.13 builds a kernel that stores a gradient in bf16 transposed,
  behind a norm's backward pass, and leaves numbers unset. In fp32 it is right.
- **`auto`**: on this machine (no AMX, and busy) PyTorch's bf16 was measured to be slower than
  fp32, so `auto` plans fp32 throughout. Its errors are those of fp32, and what it saves for
  the backward pass is fp32's: more than autocast's in resnet, vit and llama. Given rates that
  were made up, of a bf16 16 times faster, and run op by op, `auto` has 0.89, 1.01 and 0.93
  times autocast's error of gradients in vit, resnet and bert, and the forward pass saves 0.88,
  1.19 and 0.31 MB beside autocast's 1.02, 10.28 and 0.31.
- **MB of `all`** in graph_net, llama and resnet: 1.10, 1.13 and 1.01 times autocast's. What
  their forward passes save is no more than autocast's (24 KB beside 25, 418 KB both, 10.3 MB
  both); llama's logits are fp32, as the module gives them, where autocast gives bf16. The rest
  is the peak of temporaries, which the order of the kernels decides; it was not looked into.
- **Gradients of `all`** are above autocast's, which no bar forbids: `all` rounds those of
  norms and residuals as well. bart's are 12 times autocast's (op by op, not compiled): 98% of
  their norm are the embeddings', which hardly see a rounding under autocast. The median over
  its parameters is 1.7.
- **maxvit, bf16 in OpenVINO**: 1.6 times the hint's over eight inputs. The hint keeps the
  constants of pointwise ops in fp32, inside of low kernels; a model states them low. densenet
  has 1.2 by the same (`benchmarks/RESULTS-hint.md`).
- **beit, bf16 in OpenVINO**: 0.0023, as under autocast. Why the hint has 2e-05, although it
  runs most of its ops in bf16, was not found.
- **Exports with open shapes**: OpenVINO 2026.4 rounds half of what a cast to bf16 should round
  up down. What a model is given is rounded before its cast; of casts inside of it the figures
  for bf16 contain it. With fixed shapes they are right."""
