"""Export to and import from other systems: Hugging Face Marian, CTranslate2, fairseq, safetensors."""
