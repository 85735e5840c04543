// How matrices of blocks lie in the device's memory: planes.comp makes it so of the
// blocks of a file, and rows.comp reads it.
//
// A unit is 32 weights, or a block of 256 with sub-scales. The first plane has the
// codes of all units in quads of 16 bytes: of units 8g to 8g+7 the first quads, then
// the second ones. Behind it lie fifth bits, a word a unit, if the type has them, and
// scales, one for each PER units. Each plane has room for eight units more, which are
// read but not used, in whole quads.
layout(constant_id = 0) const uint TYPE = 2; // of package quant

const uint Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, MXFP4 = 39;
const uint INT4_32 = 1001, INT4_128 = 1002, INT4F_32 = 1003, INT4F_64 = 1004, INT4F_128 = 1005, INT8F_32 = 1006, INT8F_128 = 1007;
const bool INT4 = TYPE >= INT4_32 && TYPE <= INT4F_128, INT8 = TYPE == INT8F_32 || TYPE == INT8F_128;
const bool MINS = TYPE == Q4_K || TYPE == Q5_K;
const bool FIFTHS = TYPE == Q5_0 || TYPE == Q5_1;

const uint UNIT = MINS || TYPE == Q6_K ? 256 : 32;
const uint PER = TYPE == INT4_128 || TYPE == INT4F_128 || TYPE == INT8F_128 ? 4 : TYPE == INT4F_64 ? 2 : 1;
const uint QUADS = TYPE == Q4_K ? 9 : TYPE == Q5_K ? 11 : TYPE == Q6_K ? 13 : TYPE == Q8_0 || INT8 ? 2 : 1;
// Bytes of a scale; 0: it is among the quads.
const uint SCALE = MINS ? 0 : TYPE == MXFP4 ? 1 : TYPE == Q4_1 || TYPE == Q5_1 || TYPE >= INT4F_32 ? 4 : 2;

struct Places {
	uint64_t fifths, scales; // bytes from the beginning
};
Places placesOf(uint64_t units) {
	uint64_t room = (units + 15) & ~uint64_t(7);
	Places p;
	p.fifths = room * 16 * QUADS;
	p.scales = p.fifths + (FIFTHS ? (4 * room + 15) & ~uint64_t(15) : uint64_t(0));
	return p;
}
