// The one table of kernels: KERNEL(name, parameters, function). Included with KERNEL defined, by
// kernels.cu, which makes entry points of them, and by the host executor.
//
// The names are farandole_<what> and farandole_<what>_<dtype>.

#define FARANDOLE_CUDA_OF_ONE(dtype, E)                    \
  KERNEL(farandole_fold_##dtype, Fold, fold<E>)            \
  KERNEL(farandole_one_shot_##dtype, OneShot, one_shot<E>) \
  KERNEL(farandole_lanes_##dtype, Lanes, lanes<E>)

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

// Copies of any elements of so many bytes, and of floats with a factor.
KERNEL(farandole_copy_uint8, Pieces, copy_pieces<uint8_t>)
KERNEL(farandole_copy_uint16, Pieces, copy_pieces<uint16_t>)
KERNEL(farandole_copy_uint32, Pieces, copy_pieces<uint32_t>)
KERNEL(farandole_copy_uint64, Pieces, copy_pieces<uint64_t>)
KERNEL(farandole_copy_float16, Pieces, copy_pieces<Float16>)
KERNEL(farandole_copy_bfloat16, Pieces, copy_pieces<BFloat16>)
KERNEL(farandole_copy_float32, Pieces, copy_pieces<float>)
KERNEL(farandole_copy_float64, Pieces, copy_pieces<double>)

#undef FARANDOLE_CUDA_OF_ONE
