// What shaders/gpu.cu needs when it is compiled for the host (HOST): fake.c has it.
unsigned thread(void);
unsigned blockX(void);
unsigned blockY(void);
unsigned blockZ(void);
unsigned blocksX(void);
void barrier(void);
unsigned across(unsigned v, unsigned mask);
void others(void);
void tileOf(int *c, unsigned *ab, int isSigned);
