// As table.h: the kernels of nvls.cu.

#define FARANDOLE_CUDA_NVLS(dtype, E) KERNEL(farandole_nvls_##dtype, NvlsFold, nvls_fold<E>)

FARANDOLE_CUDA_NVLS(float16, Float16)
FARANDOLE_CUDA_NVLS(bfloat16, BFloat16)
FARANDOLE_CUDA_NVLS(float32, float)
FARANDOLE_CUDA_NVLS(float64, double)
FARANDOLE_CUDA_NVLS(int32, int32_t)
FARANDOLE_CUDA_NVLS(int64, int64_t)
FARANDOLE_CUDA_NVLS(uint32, uint32_t)
FARANDOLE_CUDA_NVLS(uint64, uint64_t)

#undef FARANDOLE_CUDA_NVLS
