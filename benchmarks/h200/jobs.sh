# Every projection shape of the full model once, with the batches that have their own settings.
CASES="tp8-kda_in_proj tp8-o_proj tp16-kda_in_proj tp8-mla_in_proj tp8-shared_down tp8-moe_front tp8-shared_gate_up tp16-mla_in_proj
 tp8-mla_q_b tp8-dense_gate_up tp8-dense_down tp16-mla_q_b tp16-moe_front tp16-shared_gate_up tp16-shared_down tp16-dense_gate_up
 tp16-dense_down tp8-lm_head tp16-lm_head"
JOBS=""
for m in ${ROWS:-64 8 16 32}; do for c in $CASES; do JOBS="$JOBS kimi-k3-$c:$m"; done; done
export JOBS
