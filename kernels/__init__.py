"""Operations on the key-value cache: a plain torch reference of each and its Triton kernel."""
