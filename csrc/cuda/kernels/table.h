// The one table of kernels: KERNEL(name, parameters, function). Included with KERNEL defined, by
// kernels.cu, which makes entry points of them, and by the host executor.
//
// The names are farandole_<what>, farandole_<what>_<dtype> and farandole_<what>_<from>_<to>.

#define FARANDOLE_CUDA_OF_ONE(dtype, E)                    \
  KERNEL(farandole_fold_##dtype, Fold, fold<E>)            \
  KERNEL(farandole_one_shot_##dtype, OneShot, one_shot<E>) \
  KERNEL(farandole_lanes_##dtype, Lanes, lanes<E>)         \
  FARANDOLE_CUDA_OF_TWO(dtype, E, dtype, E)

#define FARANDOLE_CUDA_OF_TWO(from, From, to, To)                    \
  KERNEL(farandole_gather_##from##_##to, Pieces, (gather<From, To>)) \
  KERNEL(farandole_scatter_##from##_##to, Pieces, (scatter<From, To>))

#define FARANDOLE_CUDA_CASTS(a, A, b, B) \
  FARANDOLE_CUDA_OF_TWO(a, A, b, B)      \
  FARANDOLE_CUDA_OF_TWO(b, B, a, A)

KERNEL(farandole_arrive, Meet, arrive)
KERNEL(farandole_await, Meet, await)
KERNEL(farandole_graph_begin, GraphCollective, graph_begin)
KERNEL(farandole_graph_end, GraphCollective, graph_end)
KERNEL(farandole_graph_arrive, GraphMeet, graph_arrive)
KERNEL(farandole_graph_pass, GraphMeet, graph_pass)

KERNEL(farandole_update_float32, Updates, update<float>)
KERNEL(farandole_update_float64, Updates, update<double>)
KERNEL(farandole_norms_float32, Norms, norms<float>)
KERNEL(farandole_norms_float64, Norms, norms<double>)

FARANDOLE_CUDA_OF_ONE(float16, Float16)
FARANDOLE_CUDA_OF_ONE(bfloat16, BFloat16)
FARANDOLE_CUDA_OF_ONE(float32, float)
FARANDOLE_CUDA_OF_ONE(float64, double)
FARANDOLE_CUDA_OF_ONE(int8, int8_t)
FARANDOLE_CUDA_OF_ONE(int16, int16_t)
FARANDOLE_CUDA_OF_ONE(int32, int32_t)
FARANDOLE_CUDA_OF_ONE(int64, int64_t)
FARANDOLE_CUDA_OF_ONE(uint8, uint8_t)
FARANDOLE_CUDA_OF_ONE(uint16, uint16_t)
FARANDOLE_CUDA_OF_ONE(uint32, uint32_t)
FARANDOLE_CUDA_OF_ONE(uint64, uint64_t)
FARANDOLE_CUDA_OF_ONE(bool, Boolean)

FARANDOLE_CUDA_CASTS(float16, Float16, bfloat16, BFloat16)
FARANDOLE_CUDA_CASTS(float16, Float16, float32, float)
FARANDOLE_CUDA_CASTS(float16, Float16, float64, double)
FARANDOLE_CUDA_CASTS(bfloat16, BFloat16, float32, float)
FARANDOLE_CUDA_CASTS(bfloat16, BFloat16, float64, double)
FARANDOLE_CUDA_CASTS(float32, float, float64, double)

#undef FARANDOLE_CUDA_OF_ONE
#undef FARANDOLE_CUDA_OF_TWO
#undef FARANDOLE_CUDA_CASTS
