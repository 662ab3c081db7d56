"""Trained models in and out of other systems: Hugging Face Marian, CTranslate2, fairseq, safetensors."""
