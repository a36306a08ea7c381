// static_memory.cu: a toy kernel whose __shared__ variable is that of a function.

__device__ int* memory_of_a_function() {
  __shared__ int value;
  return &value;
}
__global__ void has_static_memory_elsewhere(int* y) {
  *memory_of_a_function() = 1;
  y[threadIdx.x] = *memory_of_a_function();
}
